"""hpcdecode: offline LLM text generation for HPC clusters."""

__version__ = "0.1.0"
