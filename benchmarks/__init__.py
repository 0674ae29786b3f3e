"""One script per question; results beside them in results/."""
