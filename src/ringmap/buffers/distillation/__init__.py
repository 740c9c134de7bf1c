"""Rows of a student with the labels of a teacher: DAgger, and teacher to student."""
