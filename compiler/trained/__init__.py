"""What people do with a model that has been trained: talk to it, publish it, combine adapters."""
