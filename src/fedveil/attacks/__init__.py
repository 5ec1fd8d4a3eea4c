"""What dishonest clients send: backdoors, and what a claim certifies against them."""
