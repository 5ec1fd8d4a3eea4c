"""`fedveil watch`: run directories while they train, and what-if, as pages of a small server."""
