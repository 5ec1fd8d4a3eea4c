"""Pages and charts as text: escaping, scales, figures. Knows nothing of runs."""
