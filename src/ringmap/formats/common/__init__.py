"""Code that formats share: writing episode by episode, folders that are swapped whole, images, names."""
