"""The buffers under the names that ApexRL gives them, so that its programs run with one import changed."""
