"""What a running relay tells about itself."""
