"""The rows at which the Fisher metric is sampled, kept from one optimizer step to the next."""
