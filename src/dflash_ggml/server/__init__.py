"""`dflash-serve`: HTTP server with OpenAI's and Anthropic's APIs and a chat page over one engine. Needs the extra `server`."""
