"""Real data: named assets fetched once, and the image sets the experiments train on."""
