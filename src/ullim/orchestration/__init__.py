"""The asynchronous loop on Ray: who generates, who trains, who waits for whom."""
