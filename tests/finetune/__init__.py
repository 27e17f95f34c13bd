"""python -m fastdp finetune."""
