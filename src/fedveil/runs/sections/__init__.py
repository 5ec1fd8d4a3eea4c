"""The sections of a recipe: what its words mean, and read strictly, so that a slip is an error."""
