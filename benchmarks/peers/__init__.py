"""Other libraries, each filled with our episodes."""
