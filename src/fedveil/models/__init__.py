"""Models, their losses, and the flat parameter vector they share with the rest of fedveil."""
