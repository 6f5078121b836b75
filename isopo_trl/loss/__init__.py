"""What changes in TRL's loss: its forward pass, its terms without an advantage, its sequences without one."""
