"""The pinned vLLM-TPU: its flags, its models' features, what a device holds, and its container."""
