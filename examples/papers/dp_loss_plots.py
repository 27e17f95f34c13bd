from pathlib import Path
def files(out):
    return out.with_name(out.stem.replace("papers_","")+"_epochs.csv"), out.with_name(out.stem.replace("papers_","")+"_details.csv")
def draw(options): ...
