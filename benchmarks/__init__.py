"""What oneflax costs, as ratios of two things measured side by side in one run."""
