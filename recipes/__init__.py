"""Programs a user would write with the library; start from one of them."""
