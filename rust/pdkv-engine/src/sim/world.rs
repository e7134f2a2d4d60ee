//! The event loop: virtual time, and the rules that every history must keep.

mod apps;
mod faults;
mod movers;

use core::time::Duration;
use std::collections::BTreeMap;

use pdkv_core::id::{PeerKey, SessionToken, TransferId};
use pdkv_core::node::{Action, Destination, ExportState, Outcome, Role};
use pdkv_core::reference::ExportKind;
use pdkv_core::session::{self, Connecting, STEP_TIMEOUT};
use pdkv_core::wire::{FrameDecoder, MAX_FRAME, Message, encode};

use super::host::Host;
use super::net::{Channel, End, Side};
use super::rng::Rng;
use super::{Report, SimConfig};
use apps::App;

/// Time after the span within which everything must have ended: longer than any lease, claim,
/// timeout and silence one after the other.
const DRAIN: Duration = Duration::from_secs(16);

#[derive(Debug)]
enum Event {
    Deliver {
        channel: usize,
        to: Side,
        frame: Vec<u8>,
    },
    /// One end notices that the channel is gone.
    Down {
        channel: usize,
        side: Side,
    },
    Wake {
        host: usize,
        life: u32,
    },
    Step {
        host: usize,
        life: u32,
        transfer: TransferId,
    },
    /// The engine looks whether the process behind a lost channel can still write.
    CheckWriter {
        channel: usize,
        side: Side,
    },
    App(App),
    Revive {
        host: usize,
    },
    RollFaults,
}

#[derive(Debug)]
pub(super) struct World {
    config: SimConfig,
    rng: Rng,
    now: Duration,
    events: BTreeMap<(Duration, u64), Event>,
    next_event: u64,
    hosts: Vec<Host>,
    channels: Vec<Channel>,
    report: Report,
}

impl World {
    pub(super) fn new(seed: u64, config: SimConfig) -> Self {
        let mut rng = Rng::new(seed);
        let hosts = (0..config.engines)
            .map(|index| Host::new(index, 1, &config, &mut rng))
            .collect();
        Self {
            config,
            rng,
            now: Duration::ZERO,
            events: BTreeMap::new(),
            next_event: 0,
            hosts,
            channels: Vec::new(),
            report: Report {
                seed,
                ..Report::default()
            },
        }
    }

    pub(super) fn run(mut self) -> Report {
        for _ in 0..self.config.exports {
            let at = self.rng.time(self.config.span);
            self.at(at, Event::App(App::Export));
        }
        for second in 1..=self.config.span.as_secs() {
            self.at(Duration::from_secs(second), Event::RollFaults);
        }
        let end = self.config.span + DRAIN;
        while let Some(((at, _), event)) = self.events.pop_first() {
            if at > end {
                break;
            }
            self.now = at;
            self.happen(event);
        }
        self.check_end();
        self.report
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.events.insert((at.max(self.now), self.next_event), event);
        self.next_event += 1;
    }

    fn after(&mut self, most: Duration, event: Event) {
        let at = self.now + self.rng.time(most);
        self.at(at, event);
    }

    fn broken(&mut self, text: impl std::fmt::Display) {
        let text = format!("at {:?}: {text}", self.now);
        self.report.violations.push(text);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Deliver { channel, to, frame } => self.deliver(channel, to, &frame),
            Event::Down { channel, side } => self.notice_down(channel, side),
            Event::Wake { host, life } => self.wake(host, life),
            Event::Step { host, life, transfer } => self.step(host, life, transfer),
            Event::CheckWriter { channel, side } => self.check_writer(channel, side),
            Event::App(app) => self.act(app),
            Event::Revive { host } => self.revive(host),
            Event::RollFaults => self.roll_faults(),
        }
    }

    /// The end of a channel whose engine still lives the same life.
    fn living_end(&self, channel: usize, side: Side) -> Option<End> {
        let end = &self.channels[channel].ends[side];
        let host = &self.hosts[end.host];
        (host.alive && host.life == end.life).then(|| end.clone())
    }

    fn deliver(&mut self, channel: usize, to: Side, frame: &[u8]) {
        let Some(end) = self.living_end(channel, to) else {
            return;
        };
        if self.channels[channel].cut {
            return;
        }
        self.report.messages += 1;
        let message = decode(frame);
        let host = &mut self.hosts[end.host];
        let now = host.clock(self.now);
        if let Err(error) = host.node.handle(now, end.key, message) {
            self.broken(format!("an honest message was called a violation: {error}"));
        }
        self.pump(end.host);
    }

    fn wake(&mut self, host: usize, life: u32) {
        let it = &mut self.hosts[host];
        if it.alive && it.life == life {
            it.wake_at = None;
            let now = it.clock(self.now);
            it.node.tick(now);
            self.pump(host);
        }
    }

    fn notice_down(&mut self, channel: usize, side: Side) {
        self.channels[channel].cut = true;
        let Some(end) = self.living_end(channel, side).filter(|end| end.up) else {
            return;
        };
        self.channels[channel].ends[side].up = false;
        let host = &mut self.hosts[end.host];
        let now = host.clock(self.now);
        let error = pdkv_core::Error::new(pdkv_core::ErrorKind::PeerLost, "sim", "the channel was cut");
        host.node.peer_down(now, end.key, &error);
        self.at(self.now, Event::CheckWriter { channel, side });
        self.pump(end.host);
    }

    /// Carries out what a node asks for, until it asks for nothing.
    fn pump(&mut self, host: usize) {
        while let Some(action) = self.hosts[host].node.poll_action() {
            self.carry_out(host, action);
        }
        let it = &mut self.hosts[host];
        let wake = it.node.next_deadline().map(|at| it.moment(at));
        if wake.is_some() && wake != it.wake_at {
            it.wake_at = wake;
            let (life, at) = (it.life, wake.unwrap_or_default());
            self.at(at, Event::Wake { host, life });
        }
    }

    fn carry_out(&mut self, host: usize, action: Action) {
        match action {
            Action::Send { peer, message } => self.send(host, peer, &message),
            Action::Move { transfer, peer, grant } => self.start_mover(host, transfer, peer, &grant),
            Action::Stop { transfer } => match self.hosts[host].movers.get_mut(&transfer) {
                Some(mover) => mover.stop = true,
                None => self.broken(format!("stop for transfer {transfer} without a mover")),
            },
            Action::Finished { transfer, outcome } => self.finished(host, transfer, &outcome),
            Action::Quiesced { transfer } => self.quiesced(host, transfer),
            Action::ExportChanged { export, state } => self.export_changed(host, export, state),
            Action::Close { peer, .. } => {
                if let Some(&(channel, side)) = self.hosts[host].channels.get(&peer) {
                    self.channels[channel].cut = true;
                    self.channels[channel].ends[side].up = false;
                    self.at(self.now, Event::CheckWriter { channel, side });
                    self.after(
                        Duration::from_millis(300),
                        Event::Down {
                            channel,
                            side: 1 - side,
                        },
                    );
                }
            }
            _ => {}
        }
    }

    fn send(&mut self, host: usize, peer: PeerKey, message: &Message) {
        let Some(&(channel, side)) = self.hosts[host].channels.get(&peer) else {
            self.broken(format!("message `{}` for an unknown channel", message.name()));
            return;
        };
        let frame = encode(message).expect("messages of the simulator are small");
        let to = 1 - side;
        for at in self.channels[channel].arrivals(self.now, to, &self.config.faults, &mut self.rng) {
            self.at(
                at,
                Event::Deliver {
                    channel,
                    to,
                    frame: frame.clone(),
                },
            );
        }
    }

    fn finished(&mut self, host: usize, transfer: TransferId, outcome: &Outcome) {
        let it = &mut self.hosts[host];
        let now = it.clock(self.now);
        let mut wrong = Vec::new();
        if let Some(begun) = it.transfers.get_mut(&transfer) {
            if begun.finished {
                wrong.push("finished twice".to_owned());
            }
            begun.finished = true;
            if now > begun.deadline + Duration::from_millis(1) {
                wrong.push(format!(
                    "finished {:?} after its deadline",
                    now.saturating_sub(begun.deadline)
                ));
            }
            let untouched = outcome.destination() == Destination::Untouched;
            if untouched == begun.moved {
                wrong.push(format!(
                    "says `{}` but moved is {}",
                    outcome.destination().as_str(),
                    begun.moved
                ));
            }
            match (outcome, begun.spoiled) {
                (Outcome::Done { .. }, Some(kind)) => wrong.push(format!("a claim bad by `{}` succeeded", kind.slug())),
                (Outcome::Failed { error, .. }, Some(kind))
                    if error.kind().slug().starts_with("reference")
                        && error.kind() != kind
                        && !is_ended(error.kind()) =>
                {
                    wrong.push(format!(
                        "a claim bad by `{}` was refused by `{}`",
                        kind.slug(),
                        error.kind().slug()
                    ));
                }
                (Outcome::Done { .. }, None) if begun.kind == ExportKind::Export => {
                    let found = it
                        .memory
                        .wrong(begun.layers.clone(), &begun.blocks, begun.first_block, begun.export);
                    if let Some((layer, position)) = found {
                        wrong.push(format!(
                            "done with a foreign word in layer {layer} at position {position}"
                        ));
                    }
                }
                _ => {}
            }
        } else {
            wrong.push("finished but was never begun, or is quiesced".to_owned());
        }
        for text in wrong {
            self.broken(format!("transfer {transfer} of engine {host}: {text}"));
        }
        match outcome {
            Outcome::Done { .. } => self.report.done += 1,
            Outcome::Failed { .. } => self.report.failed += 1,
            Outcome::Cancelled { .. } => self.report.cancelled += 1,
        }
    }

    fn quiesced(&mut self, host: usize, transfer: TransferId) {
        let it = &mut self.hosts[host];
        let running = it.movers.contains_key(&transfer);
        let finished = match it.transfers.remove(&transfer) {
            Some(begun) => {
                it.memory.free(&begun.blocks);
                begun.finished
            }
            None => false,
        };
        if running || !finished {
            self.broken(format!(
                "transfer {transfer} quiesced; finished before: {finished}, mover runs: {running}"
            ));
        }
    }

    fn export_changed(&mut self, host: usize, export: pdkv_core::id::ExportId, state: ExportState) {
        if !state.is_quiesced() {
            return;
        }
        let it = &mut self.hosts[host];
        let Some(exported) = it.exports.remove(&export) else {
            self.broken(format!("export {export} ended twice"));
            return;
        };
        let wrong = it.memory.wrong(0..exported.layers, &exported.blocks, 0, export);
        it.memory.free(&exported.blocks);
        self.report.exports_ended += 1;
        if state == ExportState::Filled {
            self.report.filled += 1;
            if let Some((layer, position)) = wrong {
                self.broken(format!(
                    "offer {export} filled with a foreign word in layer {layer} at {position}"
                ));
            }
        }
    }

    /// A channel from one engine to another: the open one, or a new one after a handshake.
    fn connect(&mut self, from: usize, to: usize) -> Option<PeerKey> {
        if !self.hosts[from].alive || !self.hosts[to].alive {
            return None;
        }
        let (from_life, to_life) = (self.hosts[from].life, self.hosts[to].life);
        let open = self.channels.iter().find(|channel| {
            let [a, b] = &channel.ends;
            a.up && (a.host, a.life, b.host, b.life) == (from, from_life, to, to_life)
        });
        if let Some(channel) = open {
            return Some(channel.ends[0].key);
        }
        let token = SessionToken::new(self.rng.bytes());
        let attempt = self.rng.bytes();
        let now = self.hosts[from].clock(self.now);
        let connecting = Connecting::new(now, self.hosts[from].hello(attempt), STEP_TIMEOUT);
        let Message::Hello(hello) = decode(&encode(&connecting.hello()).expect("small")) else {
            return None;
        };
        let (ack, accepted) = session::accept(&self.hosts[to].hello([0; 16]), token, *hello).ok()?;
        let established = connecting.answered(now, decode(&encode(&ack).expect("small"))).ok()?;
        let index = self.channels.len();
        let keys = [self.hosts[from].new_key(), self.hosts[to].new_key()];
        let ends = [End::new(from, from_life, keys[0]), End::new(to, to_life, keys[1])];
        self.channels.push(Channel { ends, cut: false });
        for (side, host, role, established) in [(0, from, Role::Initiator, established), (1, to, Role::Owner, accepted)]
        {
            let it = &mut self.hosts[host];
            let now = it.clock(self.now);
            it.channels.insert(keys[side], (index, side));
            it.node.peer_up(now, keys[side], role, established.remote_peer());
            self.pump(host);
        }
        Some(keys[0])
    }

    /// After the drain nothing may be left on any engine that lives.
    fn check_end(&mut self) {
        let mut left = Vec::new();
        for host in self.hosts.iter().filter(|host| host.alive) {
            let counts = [
                ("exports", host.node.live_exports()),
                ("claims", host.node.live_claims()),
                ("parked claims", host.node.parked_claims()),
                ("transfers", host.node.live_transfers()),
                ("movers", host.movers.len()),
                ("blocks", host.memory.in_use()),
                ("unfinished transfers", host.transfers.len()),
            ];
            left.extend(
                counts
                    .iter()
                    .filter(|(_, n)| *n > 0)
                    .map(|(what, n)| format!("engine {} keeps {n} {what}", host.index)),
            );
        }
        let ended = self.report.done + self.report.failed + self.report.cancelled + self.report.crashed;
        if ended != self.report.begun {
            left.push(format!("{} transfers begun, {ended} ended", self.report.begun));
        }
        for text in left {
            self.broken(text);
        }
    }
}

fn decode(frame: &[u8]) -> Message {
    let mut decoder = FrameDecoder::new(MAX_FRAME);
    decoder.push(frame);
    decoder.next().expect("our own frame").expect("whole")
}

/// Refusals that come before the ones a spoiled claim provokes.
fn is_ended(kind: pdkv_core::ErrorKind) -> bool {
    use pdkv_core::ErrorKind as K;
    matches!(
        kind,
        K::ReferenceUsed | K::ReferenceReleased | K::ReferenceExpired | K::ReferenceUnknown | K::ReferenceRestarted
    )
}
