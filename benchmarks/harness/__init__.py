"""What times, proves, prints and publishes."""
