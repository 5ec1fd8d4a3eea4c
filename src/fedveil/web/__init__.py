"""Pages and charts as text: escaping, scales, series, figures. Knows nothing of runs."""
