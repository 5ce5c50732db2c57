"""Read GGUF files: their headers, the names of their tensors, and the model directory that stands for one."""
