"""What a recipe means, in words: values explained, compared and priced, data shown."""
