"""Jobs over files: `python -m nanovllm.batch INPUT OUTPUT --model DIR [options]`."""
