"""Forms that views take for those who look: JSON, and curves."""
