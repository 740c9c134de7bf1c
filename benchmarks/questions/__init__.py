"""What is asked: one module for each suite of tables."""
