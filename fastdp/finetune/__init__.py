"""Private fine-tuning from the command line: `python -m fastdp finetune`."""
