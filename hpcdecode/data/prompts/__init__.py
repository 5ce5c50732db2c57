"""From prompt files to token ids: files are read, rows checked, texts encoded by the model's tokenizer."""
