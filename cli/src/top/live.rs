//! The view on the terminal: keys, clicks, signals and the arbiter's answers, each from a thread of
//! its own, change what is shown, one after the other.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::Signal;
use ratatui::crossterm::event::{self, Event, MouseButton, MouseEvent, MouseEventKind};
use ratatui::layout::Rect;

use super::asker::{Asker, Look, NoAnswer};
use super::layout::Hit;
use super::model::Model;
use super::order::Order;
use super::screen::Screen;
use super::signals;
use super::state::{Effect, Mode, State};
use super::view::{self, Theme};

/// How often the screen is drawn where nothing happens: the age of the figures is on it.
const TICK: Duration = Duration::from_secs(1);
/// Rows that a turn of the wheel moves.
const WHEEL: isize = 3;

#[derive(Debug)]
enum Message {
    Input(Event),
    /// There is no terminal any more.
    NoInput,
    Signal(Signal),
    Looked(Box<Result<Look, NoAnswer>>),
    /// What came of a change.
    Done(Result<String, String>),
}

/// How the view ends.
enum End {
    Asked,
    By(Signal),
}

/// Shows the view until somebody ends it.
///
/// # Errors
/// The terminal's.
pub fn show(interval: Duration, readonly: bool, theme: Theme) -> anyhow::Result<()> {
    signals::hold_back().context("cannot hold signals back")?;
    let (to, messages) = mpsc::channel();
    let screen = Screen::enter().context("cannot use the terminal")?;
    signals::report(to.clone(), Message::Signal).context("cannot start a thread")?;
    start("input", to.clone(), read_input)?;
    start("arbiter", to.clone(), move |to| ask(to, interval))?;
    let mut live = Live {
        screen,
        model: Model::default(),
        state: State::new(readonly),
        theme,
        begun: Instant::now(),
        size: Rect::default(),
        to,
    };
    let end = live.run(&messages);
    drop(live);
    match end {
        Ok(End::Asked) => Ok(()),
        Ok(End::By(signal)) => {
            signals::end_by(signal);
            Ok(())
        }
        // The terminal has gone, and with it who looked at it.
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(error).context("cannot write to the terminal"),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
        || error.raw_os_error() == Some(nix::errno::Errno::EIO as i32)
}

fn start(
    name: &str,
    to: Sender<Message>,
    run: impl FnOnce(&Sender<Message>) + Send + 'static,
) -> anyhow::Result<()> {
    thread::Builder::new()
        .name(name.into())
        .spawn(move || run(&to))
        .context("cannot start a thread")?;
    Ok(())
}

fn read_input(to: &Sender<Message>) {
    while let Ok(event) = event::read() {
        if to.send(Message::Input(event)).is_err() {
            return;
        }
    }
    let _ = to.send(Message::NoInput);
}

/// Asks once per interval, and never again before there is an answer.
fn ask(to: &Sender<Message>, interval: Duration) {
    let mut asker = Asker::default();
    loop {
        let begun = Instant::now();
        let looked = asker.look();
        if to.send(Message::Looked(Box::new(looked))).is_err() {
            return;
        }
        thread::sleep(interval.saturating_sub(begun.elapsed()));
    }
}

struct Live {
    screen: Screen,
    model: Model,
    state: State,
    theme: Theme,
    begun: Instant,
    /// Of the screen as it was drawn last, which is what is clicked on.
    size: Rect,
    to: Sender<Message>,
}

impl Live {
    fn run(&mut self, messages: &Receiver<Message>) -> io::Result<End> {
        loop {
            self.draw()?;
            let mut next = match messages.recv_timeout(TICK) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(End::Asked),
            };
            // All that has come meanwhile is drawn at once.
            while let Some(message) = next {
                if let Some(end) = self.on(message)? {
                    return Ok(end);
                }
                next = messages.try_recv().ok();
            }
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn draw(&mut self) -> io::Result<()> {
        let now_ms = self.now_ms();
        let (model, state, theme) = (&self.model, &self.state, self.theme);
        let mut size = Rect::default();
        self.screen.draw(|frame| {
            size = frame.area();
            view::draw(frame.buffer_mut(), size, (model, state), theme, now_ms);
        })?;
        self.size = size;
        Ok(())
    }

    fn on(&mut self, message: Message) -> io::Result<Option<End>> {
        match message {
            Message::Input(Event::Key(key)) => {
                let columns = view::columns_of(self.size.width);
                let page = usize::from(self.size.height / 2);
                let effect = self.state.on_key(key, &self.model, page, &columns);
                return self.follow(effect);
            }
            Message::Input(Event::Mouse(mouse)) => self.on_mouse(mouse),
            // What is drawn next has the new size.
            Message::Input(_) => {}
            Message::NoInput => return Ok(Some(End::Asked)),
            Message::Signal(Signal::SIGTSTP) => {
                super::screen::give_back();
                signals::stop();
                self.screen.enter_again()?;
            }
            Message::Signal(Signal::SIGCONT) => self.screen.enter_again()?,
            Message::Signal(signal) => return Ok(Some(End::By(signal))),
            Message::Looked(looked) => match *looked {
                Ok(look) => {
                    self.model.learn(self.now_ms(), look.status);
                    self.model.learn_events(look.events);
                }
                Err(error) => self.model.lose(error.to_string()),
            },
            Message::Done(Ok(text)) => self.state.say(text, false),
            Message::Done(Err(why)) => self.state.say(why, true),
        }
        Ok(None)
    }

    fn follow(&mut self, effect: Effect) -> io::Result<Option<End>> {
        match effect {
            Effect::None => {}
            Effect::Quit => return Ok(Some(End::Asked)),
            // Comes back as a signal, as if somebody else had sent it.
            Effect::Stop => signals::ask_to_stop(),
            Effect::Redraw => self.screen.clear()?,
            Effect::CarryOut(order) => self.carry_out(order),
        }
        Ok(None)
    }

    /// A move may take minutes, and the view goes on meanwhile.
    fn carry_out(&mut self, order: Order) {
        let to = self.to.clone();
        let job = order.job.clone();
        let run = move || {
            let _ = to.send(Message::Done(order.carry_out()));
        };
        if let Err(error) = thread::Builder::new().name("change".into()).spawn(run) {
            self.state
                .say(format!("{job} stays as it is: {error}"), true);
        }
    }

    fn on_mouse(&mut self, mouse: MouseEvent) {
        // A question is answered by keys.
        if self.state.mode != Mode::Browse {
            return;
        }
        match mouse.kind {
            MouseEventKind::ScrollUp => self.state.move_by(-WHEEL, &self.model),
            MouseEventKind::ScrollDown => self.state.move_by(WHEEL, &self.model),
            MouseEventKind::Down(MouseButton::Left) => {
                let jobs = self.state.visible(&self.model);
                let layout = view::layout(self.size, &self.model, &self.state, self.theme, &jobs);
                match layout.hit(mouse.column, mouse.row, jobs.len()) {
                    Hit::Job(at) => self.state.choose(at, &self.model),
                    Hit::Header(column) => self.state.sort_by(column),
                    Hit::Nothing => {}
                }
            }
            _ => {}
        }
    }
}
