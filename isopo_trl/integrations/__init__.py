"""Other libraries: DeepSpeed, Liger, PEFT, vLLM and PyTorch's autograd, where they need to be told of ISOPO."""
