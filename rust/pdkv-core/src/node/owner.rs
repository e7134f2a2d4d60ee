//! The side that owns exports: issues references, keeps leases, ends exports. What peers do with
//! them is in `claims`.

use core::time::Duration;

use super::{Action, Node, Now, Timer};
use crate::error::{Error, ErrorKind, Result};
use crate::export::{Export, ExportSpec, ExportState};
use crate::id::{CacheId, ExportId, PeerKey};
use crate::issuer::check_wish;
use crate::reference::{ExportKind, REFERENCE_VERSION, Reference};
use crate::wire::{Fault, Message, Reject, Renew, Renewed};

impl Node {
    /// Pins blocks for readers or a writer and issues the reference.
    ///
    /// # Errors
    /// `Capacity` when too many exports live, `Config` for zero consumers, a lease of nothing or longer than
    /// `max_lease`, a long digest or an id that is taken.
    pub fn export(&mut self, now: Now, spec: ExportSpec) -> Result<Reference> {
        let error = |kind, text: String| Error::new(kind, "export", text);
        if self.exports.len() >= self.config.max_exports {
            let text = format!("`{}` exports are alive, no more are allowed", self.exports.len());
            return Err(error(ErrorKind::Capacity, text).with_hint("release exports or raise `max_exports`"));
        }
        check_wish(spec.consumers, &spec.digest, "export")?;
        if spec.kind == ExportKind::Offer && spec.consumers != 1 {
            let text = format!("`consumers` is `{}`, an offer has `1`", spec.consumers);
            return Err(error(ErrorKind::Config, text));
        }
        if spec.lease < Duration::from_millis(1) {
            return Err(error(
                ErrorKind::Config,
                format!("lease `{:?}` is shorter than a millisecond", spec.lease),
            ));
        }
        self.config.check_lease(spec.lease, "export")?;
        let Ok(num_blocks) = u32::try_from(spec.blocks.len()) else {
            return Err(error(
                ErrorKind::Layout,
                format!("`{}` blocks do not fit 32 bits", spec.blocks.len()),
            ));
        };
        if self.export_state(spec.id) != ExportState::Unknown {
            return Err(error(ErrorKind::Config, format!("export id `{}` is taken", spec.id)));
        }
        let reference = Reference {
            version: REFERENCE_VERSION,
            kind: spec.kind,
            engine: self.identity.name.clone(),
            address: self.identity.address.clone(),
            incarnation: self.identity.incarnation,
            export_id: spec.id,
            cache: spec.cache,
            digest: spec.digest.clone(),
            fingerprint: spec.fingerprint,
            num_tokens: spec.num_tokens,
            num_blocks,
            consumers: spec.consumers,
            tag: [0; 16],
        }
        .sealed(&self.identity.mac_key);
        reference.check()?;
        self.timers.arm(Timer::Lease(spec.id), now.saturating_add(spec.lease));
        self.exports.insert(spec.id, Export::new(spec));
        Ok(reference)
    }

    /// Extends the lease of an export of ours to `lease` from now; never shortens it.
    ///
    /// # Errors
    /// The reference error of the state the export is in, when it has ended; `Config` for more than `max_lease`.
    pub fn renew(&mut self, now: Now, export: ExportId, lease: Duration) -> Result<Duration> {
        self.config.check_lease(lease, "renew")?;
        if let Some(refusal) = self.export_state(export).refusal("renew") {
            return Err(refusal.with("export", export));
        }
        let timer = Timer::Lease(export);
        let wanted = now.saturating_add(lease);
        let until = self.timers.at(timer).map_or(wanted, |at| at.max(wanted));
        self.timers.arm(timer, until);
        Ok(until.saturating_sub(now))
    }

    /// Ends an export at once: no claim is granted or acknowledged any more. Blocks of an offer are
    /// reusable only when its state is quiesced. Releasing an ended export does nothing.
    ///
    /// # Errors
    /// `ReferenceUnknown` when there never was such an export, or it is forgotten.
    pub fn release(&mut self, now: Now, export: ExportId) -> Result<()> {
        let Some(record) = self.exports.get_mut(&export) else {
            return match self.tombstones.state(export).refusal("release") {
                Some(refusal) if refusal.kind() == ErrorKind::ReferenceUnknown => Err(refusal.with("export", export)),
                _ => Ok(()),
            };
        };
        if record.state == ExportState::Releasing {
            return Ok(());
        }
        record.state = ExportState::Releasing;
        self.timers.disarm(Timer::Lease(export));
        let claims: Vec<_> = record.claims.iter().copied().collect();
        let error = Error::new(
            ErrorKind::ReferenceReleased,
            "transfer",
            "the owner released the export",
        );
        for (peer, transfer) in claims {
            self.revoke(now, peer, transfer, &error);
        }
        if self
            .exports
            .get(&export)
            .is_some_and(|record| !record.claims.is_empty())
        {
            self.actions.push_back(Action::ExportChanged {
                export,
                state: ExportState::Releasing,
            });
        }
        self.settle(export);
        Ok(())
    }

    /// Where an export stands.
    pub fn export_state(&self, export: ExportId) -> ExportState {
        self.exports
            .get(&export)
            .map_or_else(|| self.tombstones.state(export), |record| record.state)
    }

    /// Releases every export of a cache that is going away.
    pub fn withdraw_cache(&mut self, now: Now, cache: CacheId) {
        self.break_promises(Some(cache));
        let exports: Vec<_> = self
            .exports
            .iter()
            .filter(|(_, e)| e.spec.cache == cache)
            .map(|(&id, _)| id)
            .collect();
        for export in exports {
            // It is alive, so releasing can't fail.
            let _ = self.release(now, export);
        }
    }

    /// Releases everything that is exported: the first step of an orderly close.
    pub fn release_all(&mut self, now: Now) {
        self.break_promises(None);
        let exports: Vec<_> = self.exports.keys().copied().collect();
        for export in exports {
            let _ = self.release(now, export);
        }
    }

    /// Life, tag and state of the export that a reference names.
    pub(super) fn check_reference(&self, reference: &Reference) -> Result<()> {
        self.check_origin(reference, "claim")?;
        self.export_state(reference.export_id)
            .refusal("claim")
            .map_or(Ok(()), Err)
    }

    /// Whether this life of this engine issued a reference.
    pub(super) fn check_origin(&self, reference: &Reference, operation: &'static str) -> Result<()> {
        let error = |kind, text: &str| Error::new(kind, operation, text);
        if reference.incarnation != self.identity.incarnation {
            let text = format!(
                "the reference is of life `{}` of engine `{}`, this is life `{}`",
                reference.incarnation, self.identity.name, self.identity.incarnation
            );
            return Err(
                error(ErrorKind::ReferenceRestarted, &text).with_hint("the owner restarted: its exports are gone")
            );
        }
        if !reference.is_genuine(&self.identity.mac_key) {
            return Err(
                error(ErrorKind::ReferenceForged, "the reference was altered on its way")
                    .with_hint("pass the text of `Reference.to_json()` unchanged"),
            );
        }
        Ok(())
    }

    /// Of an export that isn't made yet there is no lease to extend: it is unknown, as any other. A peer that asks for more
    /// than it can have gets what it can, and hears how much that is.
    pub(super) fn on_renew(&mut self, now: Now, peer: PeerKey, renew: &Renew) {
        let result = self.check_reference(&renew.reference);
        let result = result.and_then(|()| {
            let extend = renew.extend.min(self.config.max_lease);
            self.renew(now, renew.reference.export_id, extend)
        });
        let result = result.map_err(|error| Fault::of(&error));
        self.send(
            peer,
            Message::Renewed(Renewed {
                request: renew.request,
                result,
            }),
        );
    }

    pub(super) fn on_reject(&mut self, now: Now, peer: PeerKey, reject: &Reject) {
        let export = reject.reference.export_id;
        let Some(who) = self.peers.get(&peer).map(|p| (p.remote.incarnation, reject.consumer)) else {
            return;
        };
        if self.is_ahead(&reject.reference) {
            let kept = self.decline_ahead(now, &reject.reference, who);
            self.stats.stray_messages += u64::from(!kept);
            return;
        }
        let known = self.check_reference(&reject.reference).is_ok();
        let freed = known && self.exports.get_mut(&export).is_some_and(|record| record.reject(who));
        if freed {
            self.stats.rejects += 1;
            self.settle(export);
        } else {
            self.stats.stray_messages += 1;
        }
    }

    pub(super) fn lease_over(&mut self, export: ExportId) {
        let Some(record) = self.exports.get_mut(&export) else {
            return;
        };
        if record.state != ExportState::Active {
            return;
        }
        record.state = ExportState::Expiring;
        if record.is_unclaimed() {
            self.stats.expired_unclaimed += 1;
        }
        if !record.claims.is_empty() {
            self.actions.push_back(Action::ExportChanged {
                export,
                state: ExportState::Expiring,
            });
        }
        self.settle(export);
    }

    /// Moves an export to the state that its bookkeeping calls for.
    pub(super) fn settle(&mut self, export: ExportId) {
        let Some(record) = self.exports.get_mut(&export) else {
            return;
        };
        let state = record.due_state();
        if state == record.state {
            return;
        }
        record.state = state;
        if state.is_quiesced() {
            self.exports.remove(&export);
            self.tombstones.bury(export, state);
            self.timers.disarm(Timer::Lease(export));
        }
        self.actions.push_back(Action::ExportChanged { export, state });
    }
}
