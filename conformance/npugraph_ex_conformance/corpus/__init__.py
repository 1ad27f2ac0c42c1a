"""Programs that show faults of shipped systems, each with what brings the fault back."""
