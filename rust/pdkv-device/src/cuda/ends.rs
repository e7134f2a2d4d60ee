//! What became of posts, where it is more than that they passed, until somebody asks; each is told once.

use pdkv_core::Error;

use super::queue::Ticket;

#[derive(Debug, Default)]
pub(super) struct Ends(Vec<(Ticket, Ended)>);

#[derive(Debug)]
enum Ended {
    Failed(Error),
    Sums(Vec<u64>),
}

impl Ends {
    pub(super) fn failed(&mut self, ticket: Ticket, error: Error) {
        self.0.push((ticket, Ended::Failed(error)));
    }

    pub(super) fn summed(&mut self, ticket: Ticket, sums: Vec<u64>) {
        self.0.push((ticket, Ended::Sums(sums)));
    }

    pub(super) fn take_failure(&mut self, ticket: Ticket) -> Option<Error> {
        match self.take(ticket, |ended| matches!(ended, Ended::Failed(_)))? {
            Ended::Failed(error) => Some(error),
            Ended::Sums(_) => None,
        }
    }

    pub(super) fn take_sums(&mut self, ticket: Ticket) -> Option<Vec<u64>> {
        match self.take(ticket, |ended| matches!(ended, Ended::Sums(_)))? {
            Ended::Sums(sums) => Some(sums),
            Ended::Failed(_) => None,
        }
    }

    fn take(&mut self, ticket: Ticket, wanted: fn(&Ended) -> bool) -> Option<Ended> {
        let at = self.0.iter().position(|(of, ended)| *of == ticket && wanted(ended))?;
        Some(self.0.swap_remove(at).1)
    }
}
