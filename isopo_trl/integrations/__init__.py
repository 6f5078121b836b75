"""Other libraries: accelerate, DeepSpeed, Liger, PEFT, vLLM and PyTorch, where they need to be told of ISOPO."""
