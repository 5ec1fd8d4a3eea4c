"""From what was released to what it is worth: events, composition, calibration, claims."""
