"""Make folders for serving from trained weights: merged weights and PEFT adapters."""
