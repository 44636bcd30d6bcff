"""What is made of verbs, and what no verb knows."""
