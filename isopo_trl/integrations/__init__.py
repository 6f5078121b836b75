"""Other libraries: DeepSpeed, Liger, PEFT and PyTorch's autograd, where they need to be told of ISOPO."""
