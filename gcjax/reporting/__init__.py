"""What a study's results say: claims, a summary of every point, figures. It reads `gcjax.results` and never JAX."""
