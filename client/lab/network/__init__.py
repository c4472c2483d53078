"""The network of a lab: packets over TUN devices, or streams through proxies where those are not permitted."""
