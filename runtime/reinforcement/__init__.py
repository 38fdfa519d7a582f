"""Reinforcement learning from rewards: rewards of completions, their advantages, and the policy's loss."""
