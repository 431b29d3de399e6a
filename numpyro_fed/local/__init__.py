"""What is done with the local latents, inside a silo."""
