"""Models from the Hugging Face hub, stored next to recipes without their weights."""
