"""What members of a group compute from each other's messages, without knowing how these travel."""
