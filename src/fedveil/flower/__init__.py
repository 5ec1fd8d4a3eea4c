"""A recipe across sites that keep their records: the exchange of the simulator, over Flower."""
