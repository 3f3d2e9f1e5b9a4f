"""Code that the router, the engines' HTTP servers and the launcher share."""
