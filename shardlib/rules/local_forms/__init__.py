"""What ops do on a device's pieces where that is not the op itself."""
