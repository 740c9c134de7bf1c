"""Column backends behind one protocol."""
