//! Pages of the next client, made while nobody waits for them.
//!
//! A client's first call waits for its pages: four files that are made, filled, mapped and sealed,
//! some twenty system calls. One set of each kind lies ready; a second client within one
//! housekeeping tick waits for its own.

use channel::PageError;
use channel::arbiter::{ClientPages, TenantMemory};

/// What lies ready.
#[derive(Default)]
pub struct Spare {
    client: Option<ClientPages>,
    tenant: Option<TenantMemory>,
}

impl Spare {
    /// Makes what is missing. The caller that needs it tries again what fails here, and reports it.
    pub fn fill(&mut self) {
        if self.client.is_none() {
            self.client = fresh_client(true).ok();
        }
        if self.tenant.is_none() {
            self.tenant = TenantMemory::create().ok();
        }
    }

    /// Pages of a new client; with a page of signatures unless it does not ask for one.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn client(&mut self, signatures: bool) -> Result<ClientPages, PageError> {
        match self.client.take_if(|_| signatures) {
            Some(pages) => Ok(pages),
            None => fresh_client(signatures),
        }
    }

    /// The page of a new tenant.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn tenant(&mut self) -> Result<TenantMemory, PageError> {
        self.tenant.take().map_or_else(TenantMemory::create, Ok)
    }
}

/// A page of signatures that cannot be made is done without: see [`ClientPages::signatures`].
fn fresh_client(signatures: bool) -> Result<ClientPages, PageError> {
    let mut pages = ClientPages::create()?;
    if signatures && let Err(error) = pages.ask_for_signatures() {
        tracing::warn!("a client will have no profile: {error}");
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_what_another_one_has() {
        let mut spare = Spare::default();
        spare.fill();
        assert!(spare.client.is_some() && spare.tenant.is_some());
        let one = spare.client(true).expect("pages");
        assert!(one.signatures().is_some());
        assert!(spare.client.is_none(), "taken");
        let other = spare.client(true).expect("made anew");
        assert!(other.signatures().is_some());
        assert!(!std::ptr::eq(&*one.client, &*other.client));
        spare.fill();
        let without = spare.client(false).expect("pages");
        assert!(without.signatures().is_none());
        assert!(spare.client.is_some(), "not its kind");
        let tenant = spare.tenant().expect("page");
        let next = spare.tenant().expect("page");
        assert!(!std::ptr::eq(&*tenant.page, &*next.page));
    }
}
