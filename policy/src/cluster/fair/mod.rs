//! Division of resources in closed form: small exact problems that the orders approximate.
