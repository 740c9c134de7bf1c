"""Rows of a student with the labels of a teacher, for DAgger and teacher-student training."""
