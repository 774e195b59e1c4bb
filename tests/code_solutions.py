"""Right answers to the shipped code prompts, a function for each (`test_code_prompts.py`)."""

from __future__ import annotations


def minutes_open(opening, closing):
    a, b = (60 * int(x[:2]) + int(x[3:]) for x in (opening, closing))
    return b - a if b > a else b - a + 1440


def next_tram(departures, now):
    return min(((d - now) % 1440 for d in departures), default=None)


def spoken_duration(seconds):
    parts = ((seconds // 3600, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s"))
    return " ".join(f"{n}{u}" for n, u in parts if n) or "0s"


def overlap_minutes(first, second):
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def free_gaps(busy, start, end):
    gaps, at = [], start
    for a, b in sorted(busy):
        if a > at:
            gaps.append((at, min(a, end)))
        at = max(at, b)
        if at >= end:
            break
    if at < end:
        gaps.append((at, end))
    return [(a, b) for a, b in gaps if a < b]


def initials(name):
    return "".join("-".join(f"{p[0].upper()}." for p in w.split("-")) for w in name.split())


def wrap_note(text, width):
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def mask_card(number):
    digits, out = sum(c.isdigit() for c in number), []
    for c in number:
        if c.isdigit():
            out.append("*" if digits > 4 else c)
            digits -= 1
        else:
            out.append(c)
    return "".join(out)


def stutter(line):
    def one(word):
        n = 0
        while n < len(word) and word[n] not in "aeiou":
            n += 1
        return f"{word[:n]}-{word}" if n else word

    return " ".join(map(one, line.split()))


def slug(title):
    cleaned = "".join(
        c if c in "abcdefghijklmnopqrstuvwxyz0123456789" else " " for c in title.lower()
    )
    return "-".join(cleaned.split())


def longest_echo(text):
    best, run = ("", 0), 0
    for i, c in enumerate(text):
        run = run + 1 if i and text[i - 1] == c else 1
        if run > best[1]:
            best = (c, run)
    return best


def quote_depth(text):
    depths = []
    for line in text.split("\n"):
        bare = line.replace(" ", "")
        depths.append(len(bare) - len(bare.lstrip(">")))
    return depths


def swap_pairs(word):
    return "".join(word[i : i + 2][::-1] for i in range(0, len(word), 2))


def split_bill(cents, people):
    share, rest = divmod(cents, people)
    return [share + 1] * rest + [share] * (people - rest)


def settle(debts):
    held = {}
    for debtor, creditor, amount in debts:
        held[debtor] = held.get(debtor, 0) - amount
        held[creditor] = held.get(creditor, 0) + amount
    return {k: v for k, v in held.items() if v}


def parking_fee(minutes):
    return 0 if minutes <= 30 else min(12, 2 * -(-(minutes - 30) // 60))


def cheapest_crates(bottles, small, large):
    most = -(-bottles // 20)
    return min(n * large + max(0, -(-(bottles - 20 * n) // 6)) * small for n in range(most + 1))


def read_price(text):
    number = "".join(c for c in text if c.isdigit() or c == ".")
    whole, _, part = number.partition(".")
    return int(whole or 0) * 100 + int((part + "00")[:2])


def rank_with_ties(scores):
    return [1 + sum(other > s for other in scores) for s in scores]


def deal(cards, players):
    dealt = len(cards) // players * players
    return [cards[i:dealt:players] for i in range(players)], cards[dealt:]


def first_repeat_distance(values):
    last, best = {}, 0
    for i, v in enumerate(values):
        if v in last and (best == 0 or i - last[v] < best):
            best = i - last[v]
        last[v] = i
    return best


def merge_shelves(left, right):
    return sorted(left + right, key=lambda book: book[0])


def plateaus(heights):
    found, run = [], 0
    for i, h in enumerate(heights):
        run = run + 1 if i and heights[i - 1] == h else 1
        if run >= 3 and (i + 1 == len(heights) or heights[i + 1] != h):
            found.append(run)
    return found


def rotate_crew(names, weeks):
    if not names:
        return []
    n = weeks % len(names)
    return names[n:] + names[:n]


def digit_steps(number):
    steps = 0
    while number > 9:
        product = 1
        for d in str(number):
            product *= int(d)
        number, steps = product, steps + 1
    return steps


def bounce_path(height, factor):
    bounces = 0
    while True:
        height, bounces = height * factor, bounces + 1
        if height < 1:
            return bounces


def odd_ones_sum(low, high):
    return sum(n for n in range(low, high + 1) if n > 0 and all(d in "13579" for d in str(n)))


def tile_sides(area):
    side = int(area**0.5) + 1
    while side > area or area % side or side > area // side:
        side -= 1
    return side, area // side


def lamp_states(lamps, presses):
    return [n for n in range(1, lamps + 1) if sum(n % k == 0 for k in presses) % 2]


def nearest_step(value, step):
    size = (2 * abs(value) + step) // (2 * step) * step
    return size if value >= 0 else -size


def busiest_table(orders):
    counts, best = {}, None
    for table, _ in orders:
        counts[table] = counts.get(table, 0) + 1
        if best is None or counts[table] > counts[best]:
            best = table
    return best


def invert_menu(menu):
    found = {}
    for dish in sorted(menu):
        for part in dict.fromkeys(menu[dish]):
            found.setdefault(part, []).append(dish)
    return found


def stock_after(stock, events):
    held = dict(stock)
    for event in events:
        change, name = event.split(" ", 1)
        if held.get(name, 0) + int(change) >= 0:
            held[name] = held.get(name, 0) + int(change)
    return {k: v for k, v in held.items() if v}


def read_settings(text):
    found = {}
    for line in text.split("\n"):
        line = line.strip()
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name.strip()] = value.strip()
    return found


def count_islands_of(grid, mark):
    left = {(r, c) for r, row in enumerate(grid) for c, x in enumerate(row) if x == mark}
    areas = 0
    while left:
        areas, todo = areas + 1, [left.pop()]
        while todo:
            r, c = todo.pop()
            for cell in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                if cell in left:
                    left.remove(cell)
                    todo.append(cell)
    return areas


def robot_end(moves, width, height):
    x = y = 0
    for m in moves:
        dx, dy = {"U": (0, 1), "D": (0, -1), "L": (-1, 0), "R": (1, 0)}[m]
        if 0 <= x + dx < width and 0 <= y + dy < height:
            x, y = x + dx, y + dy
    return x, y


def seats_in_sight(rows):
    return sum(
        row[i] == "o" and "x" not in row[max(0, i - 1) : i + 2]
        for row in rows
        for i in range(len(row))
    )


def turn_quarter(rows):
    return ["".join(column) for column in zip(*rows[::-1], strict=True)]


def run_counter(program):
    value = at = 0
    while at < len(program):
        word, *rest = program[at].split()
        if word == "add":
            value += int(rest[0])
        elif word == "double":
            value *= 2
        elif value % 2:
            at += int(rest[0])
        at += 1
    return value


def lift_travel(start, calls):
    total = 0
    for waits, goes in calls:
        total += abs(start - waits) + abs(waits - goes)
        start = goes
    return total
